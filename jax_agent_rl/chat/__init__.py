"""Messages to token ids and back, without drift.

``codec`` the interface · ``template`` a model's chat template and the text between two turns · ``control`` control
tokens · ``formats`` tool-call formats and think blocks · ``grammar`` constrained turns · ``media`` ids of images and
videos.
"""
