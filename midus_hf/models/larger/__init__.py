"""Models that hold a language model beside towers for pictures or sounds, with memory in the language model."""
