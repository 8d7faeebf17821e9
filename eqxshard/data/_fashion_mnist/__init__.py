"""Fashion-MNIST, and a generated replacement for tests and demos."""
