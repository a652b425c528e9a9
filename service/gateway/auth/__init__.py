"""API keys and quotas."""
