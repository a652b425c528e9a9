"""The matmul op: public function, kernels, configuration and reference."""
