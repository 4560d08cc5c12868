bucket_config = {
    "256px": {
        1: (1.0, 45),  # for 256px images, use 100% of the data with batch size 45
        33: (1.0, 12),  # for 256px videos with no less than 33 frames, use 100% of the data with batch size 12
        65: (1.0, 6),  # for 256px videos with no less than 65 frames, use 100% of the data with batch size 6
        97: (1.0, 4),  # for 256px videos with no less than 97 frames, use 100% of the data with batch size 4
        129: (1.0, 3),  # for 256px videos with no less than 129 frames, use 100% of the data with batch size 3
    },
    "768px": {
        1: (0.5, 13),  # for 768px images, use 50% of the data with batch size 13
    },
    "1024px": {
        1: (0.5, 7),  # for 1024px images, use 50% of the data with batch size 7
    },
}
