"""``python -m nanoserve_lab`` is the command ``nanoserve-lab``."""

from nanoserve_lab.cli import app

if __name__ == "__main__":
    app(prog_name="nanoserve-lab")
