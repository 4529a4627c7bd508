"""Reads the text of documents: PDF, Word, PowerPoint, OpenDocument, EPUB, HTML, e-mail and notebooks."""
