"""The entries of a batch that say how much its examples count."""

#: In the loss and in metrics. No entry of a user's own has such a name by accident.
WEIGHT = "__weight__"
#: In the loss alone.
LOSS_WEIGHT = "__loss_weight__"
