"""Parts of language models, safe on any mesh.

Attention, rotary positions and the cross-entropy of next tokens, for use inside a model,
and the share of the devices' peak FLOP/s that training uses. This room may use `sharding`,
`transforms` and `parallel`.
"""

from ..sharding._peaks import mfu as mfu
from ..sharding._peaks import peak_flops as peak_flops
from ._attention import attention as attention
from ._cross_entropy import cross_entropy as cross_entropy
from ._flops import flops_per_token as flops_per_token
from ._rotary import RotaryScaling as RotaryScaling
from ._rotary import rotary as rotary
