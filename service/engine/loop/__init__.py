"""The loop of one engine: receive, resolve, schedule, compute, reply."""
