"""What pages of HTML are made of: escaped markup, a frame, cards, tables, bars.

The pages themselves are in the rooms of what they show. May use nothing.
"""
