"""Controllers trained across federations: random federations (`over`), the evolution strategy
(`evolve`), controllers for the package (`pretrained`)."""
