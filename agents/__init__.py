"""RL controllers in pure JAX: arrays in, arrays out, nothing federated."""
