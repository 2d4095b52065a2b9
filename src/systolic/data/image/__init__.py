"""Pictures: folders of files, IDX archives, small sets in memory, decoding and augmentation."""
