"""Messages to token ids and back, without drift.

``codec`` the interface · ``template`` a model's chat template and the text between two turns ·
``special_tokens`` control tokens, placeholders of images and videos · ``formats`` tool-call formats
and think blocks · ``grammar`` constrained turns.
"""
