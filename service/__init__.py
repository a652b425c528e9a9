"""The Tilewire service: HTTP gateways in front, GPU engines behind. ARCHITECTURE.md draws the rooms."""

__version__ = "0.1.0"
