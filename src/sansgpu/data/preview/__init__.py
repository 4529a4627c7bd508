"""Shows rows as examples: what they contain, as a model learns it, and facts about all rows of a dataset."""
