"""What a device says of itself: memory, power, temperature, utilization."""
