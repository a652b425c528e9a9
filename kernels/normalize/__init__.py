"""Layer, root-mean-square and 2-norm normalisation."""
