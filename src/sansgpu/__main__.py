"""`python -m sansgpu`, the form launchers such as torchrun start."""

from sansgpu.cli import main

if __name__ == "__main__":
    main()
