"""The gRPC door: the Open Inference Protocol's service around the request path, in a process of its own."""
