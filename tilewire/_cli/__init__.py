"""The commands of the client's side: one file for each group of them. Needs typer and rich, the extra `cli`."""
