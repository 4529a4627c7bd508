"""Tags words: entities, parts of speech."""
