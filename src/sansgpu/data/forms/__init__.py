"""The forms in which rows come, and their typed content. `table.FORMS` lists them all."""
