"""How the demo captioner is made: the pictures that it learns from and its training.

pictures.py   pictures with some shapes of one kind and color, and dialogs about them
tokenizer.py  the tokenizer of the dialogs' words, with the chat template
train.py      the training, from nothing to a checkpoint
evaluate.py   how many unseen pictures the served model describes right
"""
