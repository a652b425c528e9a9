"""Routes: native, Open Inference Protocol, health and console."""
