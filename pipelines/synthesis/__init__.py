"""Problems with levels and disjoint splits, and demonstrations by rule-based teachers."""
