"""Output for people: terminal, live view, tables, HTML reports, plots and model cards."""
