"""Entry point of `python -m sansgpu`, which launchers such as torchrun use."""

from sansgpu.cli import main

if __name__ == "__main__":
    main()
