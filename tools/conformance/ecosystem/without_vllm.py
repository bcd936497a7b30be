"""Hides vLLM from the trainers of TRL; ``warm`` imports this module before them.

TRL imports vLLM wherever it is installed. Here it is installed without its requirements, for one
file that ``test_changes_in_vllm.py`` reads.
"""

from trl import import_utils

import_utils.is_vllm_available = lambda min_version=None: False
