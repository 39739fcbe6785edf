"""Beginnings of a user's turn, which the target continues before it answers: they spread its chats over many kinds of task.

Left alone, a small model begins most turns alike. All lines are written for this file; none is taken from an evaluation set, and
what the target makes of them passes the 13-gram check like any other prompt.
"""

from __future__ import annotations

OPENINGS: dict[str, tuple[str, ...]] = {
    kind: tuple(line.strip() for line in lines.strip().splitlines())
    for kind, lines in {
        "writing": """
            Write a short story about
            Write a story that begins with the sentence
            Write a poem about
            Write a haiku about
            Write a persuasive essay arguing that
            Write a blog post titled
            Write a product description for
            Write a speech for
            Write the opening paragraph of a novel in which
            Write a dialogue between
            Write a review of
            Write a news article about
            Write a song about
            Write a fairy tale in which
            Draft a press release announcing
            Draft a short article for a local newspaper about
            Describe a scene in which
            Describe in vivid detail
            Compose a toast for
            Compose a letter from
            Create a slogan for
            Create a character who
            Give me a title and an outline for an essay about
            I need a caption for a photo of
            Tell me a joke about
            Can you write a travel article about
            Please write a cover letter for a job as
            Continue this story:
            Finish the following paragraph:
        """,
        "email": """
            Write an email to my manager
            Write a polite email to
            Write a formal letter to
            Draft a reply to this email:
            Draft an email inviting
            Help me write an apology to
            Help me write a thank-you note for
            Write a complaint to
            Compose an out-of-office message for
            Write a reminder to my team about
            Write a message to my landlord about
            How should I start an email to
        """,
        "role-play": """
            Pretend you are
            Imagine that you are
            Act as a
            You are a detective who
            You are an experienced doctor. A patient asks:
            You are a history teacher. Explain to your class
            You are a tour guide in
            You are the captain of a ship
            You are a chef. Tell me how you would
            You are a robot that
            Speak as if you were
            Let's play a game where you
            Answer as a pirate would:
            Answer as a famous scientist would:
            Answer as my personal trainer:
            Take the role of a job interviewer for
            Take the role of a philosopher and discuss
            As a financial adviser, what would you say to
            As a gardener, how would you
            I want you to act as
            In the voice of an old sailor, tell me
            Suppose you were a river in
        """,
        "reasoning": """
            If all
            If it takes
            If a train leaves
            Three friends
            There are five
            A farmer has
            A man walks
            Anna is older than
            Tom has twice as many
            Which of these does not belong:
            Which is heavier,
            Which word is the odd one out:
            Solve this riddle:
            Here is a puzzle:
            What comes next in the sequence
            Suppose that you have two
            Is the following argument valid?
            Explain the flaw in this argument:
            What conclusion can be drawn from these facts?
            Decide whether the statement is true or false and explain why:
            In a race,
            Think step by step:
            My brother is
            A box contains
            On Monday,
        """,
        "mathematics": """
            Solve the equation
            Solve for x:
            Find the value of
            Find the area of
            Find the derivative of
            Find the probability that
            Calculate the sum of
            Calculate the perimeter of
            Calculate the average of
            Compute
            What is the square root of
            What is the result of
            How many ways can
            How many different
            Simplify the expression
            Factor the polynomial
            Prove that
            Convert
            The sum of two numbers is
            The price of a
            A rectangle has
            A store sells
            A car travels
            A class has
            A triangle has sides
            Given the function f(x) =
            Given the points
            Let x and y be
            What is the remainder when
            Explain how to multiply two
            Mary buys
            What percentage of
        """,
        "coding": """
            Write a Python function that
            Write a Python program to
            Write a Python script that reads
            Write a function in JavaScript that
            Write a C++ program that
            Write a Java class that
            Write a SQL query that
            Write an HTML page with
            Write a shell script that
            Write a regular expression that
            Write a unit test for
            Implement a stack
            Implement binary search
            Implement an algorithm to sort
            Implement a class for
            Given an array of integers,
            Given a string, write code that
            Given a linked list,
            Given two sorted lists,
            Explain what this code does:
            Fix the bug in this code:
            Refactor the following function:
            What is the time complexity of
            What is the difference between a list and
            How do I read a file in
            How do I reverse a string in
            How can I parse JSON in
            How do you declare a variable in
            Explain recursion with
            Explain object-oriented programming
            Design a database for
            Create a simple web page that
            Show me an example of a loop in
            Why does my program
            Translate this Python code to
        """,
        "extraction": """
            Read the following passage and answer the question:
            Read the text below and list all
            Extract the names of all people from this text:
            Extract the dates from the following paragraph:
            Extract the key facts from this article:
            From the following sentences, find
            Given the following review, decide whether it is positive or negative:
            Given this table of sales figures,
            Given this list of animals, return
            Given these records in CSV format,
            Classify each of the following items as
            Classify the sentiment of this sentence:
            Identify the subject and the verb in
            Identify the main idea of the following text:
            Return a JSON object with
            Turn this paragraph into a table:
            Format the following information as JSON:
            Put the following events in order:
            Sort the following words
            Count how many times
            Name the countries mentioned in this text:
            What are the keywords of this paragraph:
            Who is the author of
            Which of these comments are complaints:
        """,
        "summary": """
            Summarize the following text:
            Summarize this article in two sentences:
            Summarize the plot of
            Summarize the main points of
            Give me a short summary of
            Give a one-paragraph overview of
            Condense this passage into
            What is the main point of the following paragraph?
            Explain in one sentence
            TL;DR of this text:
            Write an abstract for a paper about
            Make a bullet-point summary of
        """,
        "editing": """
            Rewrite the following sentence
            Rewrite this paragraph in simpler words:
            Rewrite this text so that a child understands it:
            Correct the grammar in this text:
            Correct the spelling mistakes in
            Edit the following paragraph for
            Proofread this sentence:
            Improve this sentence:
            Make this text more formal:
            Make this message sound friendlier:
            Shorten the following text:
            Paraphrase this sentence:
            Change this sentence to the passive voice:
            Replace the adjectives in this sentence:
            Translate the following sentence into
            Translate "
            Is this sentence grammatically correct?
            Combine these two sentences into one:
        """,
        "science": """
            Explain photosynthesis
            Explain how a
            Explain the theory of
            Explain the law of
            Explain the difference between
            Explain why the sky
            Explain Newton's
            What is the chemical formula of
            What is the function of
            What happens when
            What causes
            What would happen if the Earth
            What are the main parts of
            What are the stages of
            Why do planets
            Why does water
            Why do some animals
            How do vaccines
            How does a battery
            How does the human heart
            How do bridges
            How does the internet
            How is electricity
            How are mountains
            Describe the structure of
            Describe the process of
            Describe an experiment that
            Compare mitosis
            Compare renewable
            Define entropy
            Define the term
            What role does DNA
            What is the speed of
            What is machine learning
            What is a neural network
            What is quantum
            Give an example of a chemical reaction
            How can engineers
        """,
        "humanities": """
            What caused the
            What were the consequences of
            What was the role of
            What is the meaning of
            What is the significance of
            Who was the first
            Who invented
            Who wrote
            When did the
            Where did the
            Discuss the causes of
            Discuss the impact of
            Discuss the role of religion in
            Analyze the theme of
            Analyze the character of
            Compare the economies of
            Compare the philosophies of
            Compare and contrast the
            Describe the history of
            Describe the culture of
            Explain the importance of
            Explain the concept of democracy
            Explain the concept of inflation
            Explain supply and demand
            How did the Industrial Revolution
            How did the Roman Empire
            How does culture
            How has art
            How does a bill
            Why did the
            What are human rights
            Outline the main events of
            Create a lesson plan about
            Provide a timeline of
            What can we learn from
        """,
        "opinion": """
            What do you think about
            Do you believe that
            Do you agree that
            Is it better to
            Is it ethical to
            Should schools
            Should governments
            Should people
            Give arguments for and against
            What are the advantages and disadvantages of
            What are the pros and cons of
            Which is better,
            Make the case for
            Why is it important to
            What is your favorite
            How would you convince someone that
        """,
        "advice": """
            How can I improve my
            How can I learn
            How can I stop
            How do I make
            How do I fix
            How do I choose
            How do I prepare for
            How should I invest
            How to cook
            How to grow
            I am planning a trip to
            I am feeling
            I have an interview
            I want to start
            I need help with
            I just bought
            I have trouble
            My friend and I
            My computer
            My dog
            What should I do if
            What should I wear
            What is the best way to
            What are some tips for
            What are some good
            What are some ideas for
            Can you recommend
            Can you help me
            Can you explain
            Could you tell me
            Please explain
            Plan a
            Suggest a recipe for
            Suggest a gift for
            Create a weekly schedule for
            Create a workout plan for
            Create a budget for
            Give me step-by-step instructions for
            Give me advice on
            Design a logo for
        """,
        "lists": """
            List five
            List ten
            List the steps
            List the planets
            List some common
            Name three
            Name a country
            Give me five examples of
            Give me a list of
            Give three reasons why
            Generate a list of
            Generate ten names for
            Generate questions for
            Brainstorm ideas for
            Make a shopping list for
            Make a checklist for
            Rank the following
            Come up with
            Think of
            Write down
        """,
        "short": """
            Who is
            What is
            What are
            Where is
            When was
            Why is
            Why are
            How many
            How much
            How long
            How old
            Is there
            Are there
            Does
            Did
            Tell me about
            Hello!
            Hi, I
            Yes or no:
            The following
            In the context of
            According to
            Based on
            Consider
            Suppose
            Given
            Let's
            Use
            Provide
            Compare
            Determine
            Develop
            Construct
            Choose
            Fill in the blank:
            Complete the sentence:
            Answer the following question:
            Rate
            Arrange
            Find
        """,
    }.items()
}


def all_openings() -> list[str]:
    """Every opening, kind after kind."""
    return [line for lines in OPENINGS.values() for line in lines]
