"""The papers that methods come from."""

from upscalers.engine.method import Paper

MIDUS = Paper(
    title="MIDUS: Memory-Infused Depth Up-Scaling",
    reference="arXiv:2512.13751",
    bibtex="""@article{midus,
  title   = {{MIDUS}: Memory-Infused Depth Up-Scaling},
  journal = {arXiv preprint arXiv:2512.13751},
  year    = {2025}
}""",
)
