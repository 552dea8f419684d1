"""Families of models: a file each if the general decoder suffices, otherwise a folder.

llama.py       Llama, Mistral, Mixtral, Qwen2, Qwen3, MiMo, Phi-3 and Phi-4
gemma.py       Gemma 1 and 2, and the language models of Gemma 3, 3n and 4
qwen_moe.py    Qwen2-MoE, Qwen3-MoE and gpt-oss
qwen_next.py   Qwen3-Next, with the gated delta rule
kimi_linear.py Kimi-Linear, with Kimi Delta Attention and latents
gpt.py         GPT-2; GPT-NeoX and Pythia; Falcon, with multi-query, grouped or full multi-head attention
lfm2.py        LFM2, with short convolutions
mamba.py       Mamba-2, and Granite 4 and Nemotron-H, with Mamba-2
switches.py    the switches that a row of the table may set, and how a config is read by them
variants.py    a table of families that differ in switches: StarCoder2, SmolLM3, Granite, OLMo, Command R, GLM, ...
encoders.py    BERT, RoBERTa, XLM-RoBERTa, Nomic BERT and ModernBERT, for embeddings and classification
deepseek/      DeepSeek-V2 and V3, Kimi K2, GLM-4.7-Flash and Mistral 4, whose keys and values are latents
opt/           OPT
"""
