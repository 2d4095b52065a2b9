"""ResNet-18 on images of 32x32x3, side by side: see README.md."""

import harness

if __name__ == "__main__":
    harness.main("vision", "images")
