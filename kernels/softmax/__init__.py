"""The softmax op: public function, kernels, configuration and reference."""
