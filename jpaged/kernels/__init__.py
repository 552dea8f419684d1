"""Operations on device arrays, one folder each; the XLA version of an operation is its specification."""
