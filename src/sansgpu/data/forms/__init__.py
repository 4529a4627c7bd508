"""The forms in which rows come, and their typed content. `registry.FORMS` lists them all."""
