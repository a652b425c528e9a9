"""The Tilewire service: HTTP gateways in front, GPU engines behind. ARCHITECTURE.md draws the rooms."""
