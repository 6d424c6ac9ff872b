"""Controllers trained across federations: what is drawn (`over`), the evolution strategy
(`evolve`), what comes with the package (`pretrained`)."""
