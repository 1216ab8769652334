"""The papers that methods come from."""

from upscalers.methods.contract import Paper

MIDUS = Paper(
    title="MIDUS: Memory-Infused Depth Up-Scaling",
    reference="arXiv:2512.13751",
    bibtex="""@article{midus,
  title   = {{MIDUS}: Memory-Infused Depth Up-Scaling},
  journal = {arXiv preprint arXiv:2512.13751},
  year    = {2025}
}""",
)

SOLAR = Paper(
    title="SOLAR 10.7B: Scaling Large Language Models with Simple yet Effective Depth Up-Scaling",
    reference="arXiv:2312.15166",
    bibtex="""@article{solar,
  title   = {{SOLAR} 10.7B: Scaling Large Language Models with Simple yet Effective Depth Up-Scaling},
  author  = {Kim, Dahyun and others},
  journal = {arXiv preprint arXiv:2312.15166},
  year    = {2023}
}""",
)

LLAMA_PRO = Paper(
    title="LLaMA Pro: Progressive LLaMA with Block Expansion",
    reference="arXiv:2401.02415",
    bibtex="""@article{llamapro,
  title   = {{LLaMA} Pro: Progressive {LLaMA} with Block Expansion},
  author  = {Wu, Chengyue and others},
  journal = {arXiv preprint arXiv:2401.02415},
  year    = {2024}
}""",
)

LESA = Paper(
    title="LESA: Learnable LLM Layer Scaling-Up",
    reference="arXiv:2502.13794",
    bibtex="""@article{lesa,
  title   = {{LESA}: Learnable {LLM} Layer Scaling-Up},
  author  = {Yang, Yifei and others},
  journal = {arXiv preprint arXiv:2502.13794},
  year    = {2025}
}""",
)

OPT_DEUS = Paper(
    title="Progressive Depth Up-scaling via Optimal Transport",
    reference="arXiv:2508.08011",
    bibtex="""@article{optdeus,
  title   = {Progressive Depth Up-scaling via Optimal Transport},
  author  = {Cao, Mingzi and others},
  journal = {arXiv preprint arXiv:2508.08011},
  year    = {2025}
}""",
)

MIXTURE_OF_CHAPTERS = Paper(
    title="Mixture of Chapters: Scaling Learnt Memory in Transformers",
    reference="ICLR 2026 Workshop on New Frontiers in Associative Memories",
    bibtex="""@inproceedings{mixtureofchapters,
  title     = {Mixture of Chapters: Scaling Learnt Memory in Transformers},
  author    = {Tibrewal, Tasmay Pankaj and Saha, Pritish and Meda, Ankit and Singh, Kunal and Moturi, Pradeep},
  booktitle = {ICLR Workshop on New Frontiers in Associative Memories},
  year      = {2026}
}""",
)

HIERARCHICAL_MEMORIES = Paper(
    title="Pretraining with Hierarchical Memories: Separating Long-Tail and Common Knowledge",
    reference="arXiv:2510.02375",
    bibtex="""@inproceedings{hierarchicalmemories,
  title     = {Pretraining with Hierarchical Memories: Separating Long-Tail and Common Knowledge},
  author    = {Pouransari, Hadi and Grangier, David and Thomas, C and Kirchhof, Michael and Tuzel, Oncel},
  booktitle = {International Conference on Learning Representations},
  year      = {2026}
}""",
)
ULTRAMEM_V2 = Paper(
    title="UltraMemV2: Memory Networks Scaling to 120B Parameters with Superior Long-Context Learning",
    reference="arXiv:2508.18756",
    bibtex="""@article{ultramemv2,
  title   = {{UltraMemV2}: Memory Networks Scaling to {120B} Parameters with Superior Long-Context Learning},
  author  = {Huang, Zihao and Bao, Yu and Min, Qiyang and Chen, Siyan and Guo, Ran and Huang, Hongzhi and Zhu, Defa and Zeng, Yutao
             and Wu, Banggu and Zhou, Xun and Qiao, Siyuan},
  journal = {arXiv preprint arXiv:2508.18756},
  year    = {2025}
}""",
)
MODA = Paper(
    title="Mixture-of-Depths Attention",
    reference="arXiv:2603.15619",
    bibtex="""@article{moda,
  title   = {Mixture-of-Depths Attention},
  author  = {Zhu, Lianghui and Fang, Yuxin and Liao, Bencheng and Wang, Shijie and Cheng, Tianheng and Huang, Zilong and Chen, Chen
             and Wei, Lai and Zeng, Yutao and Wang, Ya and Lin, Yi and Li, Yu and Wang, Xinggang},
  journal = {arXiv preprint arXiv:2603.15619},
  year    = {2026}
}""",
)
