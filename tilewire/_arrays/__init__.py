"""Arrays of the caller: their dtypes, their libraries, their files, and what an op makes of them."""
