"""The parts of HTML pages: escaped markup, a frame, cards, tables, bars.

The pages themselves are in the rooms whose results they show. May use nothing.
"""
