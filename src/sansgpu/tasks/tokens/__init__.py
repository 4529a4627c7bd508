"""Token classification: named entities, parts of speech."""
