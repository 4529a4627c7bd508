"""Formats of files: compression and archives, encodings, separators, spreadsheets and Arrow."""
