"""An opened model: set-up of its job, evaluation, generation, and answers for files, texts, recordings and arrays."""
