"""Products of unequal shape in one launch: public function, kernel and its device table."""
