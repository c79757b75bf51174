"""Single digits as words. The work of a problem names its running state in words and echoes the problem's own tokens.

With two disjoint sets of tokens a small model tells what it read from what it computed; with digits for both, learning
the same steps takes two to three times as many updates.
"""

from __future__ import annotations

DIGIT_WORDS = (" zero", " one", " two", " three", " four", " five", " six", " seven", " eight", " nine")
