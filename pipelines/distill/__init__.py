"""Distillation: a smaller student learns from the verified samples and the token distributions of a teacher."""
