"""Programs for developers that measure nothing: they write pages, pictures and tiny models, and test commands."""
