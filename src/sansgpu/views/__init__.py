"""Everything that a person looks at: terminal, live view, tables, HTML reports, plots and model cards."""
