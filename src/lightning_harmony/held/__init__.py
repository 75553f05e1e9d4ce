"""What Python holds for a step: the places where code keeps something, and who reads or changes what is there."""
