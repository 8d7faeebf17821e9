from ._weight_names import WeightsReport as WeightsReport
from ._weights import compare_weights as compare_weights
