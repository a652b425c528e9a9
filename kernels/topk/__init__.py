"""The k best elements of each row."""
