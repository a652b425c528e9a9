"""Many copies in one launch."""
