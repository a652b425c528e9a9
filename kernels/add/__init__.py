"""The add op: public function, kernels, configuration and reference."""
