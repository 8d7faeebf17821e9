from ._explanation import Explanation as Explanation
from ._explanation import Leaf as Leaf
from ._lint import Finding as Finding
from ._lint import Findings as Findings
from ._lint import LintWarning as LintWarning
from ._pictures import Picture as Picture
